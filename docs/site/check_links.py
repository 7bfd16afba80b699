#!/usr/bin/env python3
"""Every link of a folder of HTML leads to a file that is there, and to an id in it. Links to other hosts are not followed.

    check_links.py FOLDER [--mend PART]     PART: a folder below it, whose links to ids that are not there lead to the page instead;
                                            Doxygen names members that it does not show
"""
import html.parser
import pathlib
import re
import sys
import urllib.parse


class page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.targets = set(), []
        self.feed(path.read_text(encoding="utf-8", errors="replace"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.update(value for name, value in attributes.items() if name == "id" or (name == "name" and tag == "a"))
        for name in ("href", "src"):
            if attributes.get(name):
                self.targets.append(attributes[name])


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    mended = folder / sys.argv[3] if sys.argv[2:3] == ["--mend"] else None
    pages = {path: page(path) for path in folder.rglob("*.html")}
    dead = set()
    links = 0
    for path, content in pages.items():
        for target in set(content.targets):
            if re.match(r"[a-z]+:|//", target):
                continue
            links += 1
            url = urllib.parse.urlsplit(target)
            there = path if not url.path else (path.parent / urllib.parse.unquote(url.path)).resolve()
            if url.path.startswith("/"):
                there = folder / url.path.lstrip("/")
            if there.is_dir():
                there = there / "index.html"
            if not there.exists():
                dead.add(f"{path.relative_to(folder)}: no such file: {target}")
            elif url.fragment and there in pages and urllib.parse.unquote(url.fragment) not in pages[there].ids:
                if mended in path.parents:
                    path.write_text(path.read_text(encoding="utf-8").replace(f'href="{target}"', f'href="{url.path or "#"}"'))
                else:
                    dead.add(f"{path.relative_to(folder)}: no such place: {target}")
    print("\n".join(sorted(dead)) or f"{len(pages)} pages, {links} links, none dead: {folder}/index.html")
    return 1 if dead or not pages else 0


sys.exit(main())
