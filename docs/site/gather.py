#!/usr/bin/env python3
"""Gathers the Markdown of the repository in one folder for mkdocs, with links that hold there.

    gather.py REPOSITORY FOLDER

Pages of docs/ keep their places; other Markdown files become pages of `more/`. What else a link names in the repository, a
source or a folder, becomes a page that shows it.
"""
import os
import pathlib
import re
import shutil
import sys

LANGUAGES = {".hpp": "cpp", ".cuh": "cpp", ".cpp": "cpp", ".cu": "cpp", ".h": "c", ".c": "c", ".py": "python", ".rs": "rust"}
# Pages from outside of docs/.
MORE = {
    "README.md": "more/readme.md",
    "CHANGELOG.md": "more/changelog.md",
    "CONTRIBUTING.md": "more/contributing.md",
    "SECURITY.md": "more/security.md",
    "examples/llama/README.md": "more/llama.md",
    "examples/llama/data/NOTICE.md": "more/notice.md",
    "bench/baselines/README.md": "more/baselines.md",
    "packaging/README.md": "more/packaging.md",
}


class gathered:
    def __init__(self, root, out):
        self.root, self.out = root, out
        self.pages = {name: page for name, page in MORE.items() if (root / name).exists()}
        for path in (root / "docs").rglob("*.md"):
            name = path.relative_to(root).as_posix()
            page = path.relative_to(root / "docs").as_posix()
            self.pages[name] = "index.md" if page == "README.md" else page
        self.shown = {}  # other things that links name, and their pages

    def page_of(self, name):
        if name in self.pages:
            return self.pages[name]
        path = self.root / name
        if path.is_dir():
            readme = f"{name}/README.md"
            if readme in self.pages:
                return self.pages[readme]
        if path.suffix == ".svg":
            return "plots/" + path.name
        self.shown[name] = "source/" + name.strip("/").replace("/", "_").replace(".", "_") + ".md"
        return self.shown[name]

    def with_links(self, text, name, page):
        def new_target(match):
            target, _, heading = (match["target"] or "").partition("#")
            if not target or re.match(r"[a-z]+:", target):
                return match[0]
            there = os.path.normpath(os.path.join(os.path.dirname(name), target))
            link = os.path.relpath(self.page_of(there), os.path.dirname(page) or ".")
            return f"{match['text']}({link}{'#' + heading if heading else ''})"

        # Code stays as it is: blocks, and words that are no text of a link.
        link = r"(?P<text>(?:\[`[^`\n]*`)?\])\((?P<target>[^)\s]+)\)"
        return re.sub(rf"^```.*?^```[^\n]*$|{link}|`[^`\n]*`", new_target, text, flags=re.S | re.M)

    def write(self, page, text):
        path = self.out / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def source_page(self, name):
        path = self.root / name
        if path.is_dir():
            names = sorted(p.name + ("/" if p.is_dir() else "") for p in path.iterdir() if not p.name.startswith((".", "__")))
            return f"# {name}\n\n" + "\n".join(f"- `{n}`" for n in names) + "\n"
        if path.suffix == ".md":
            sys.exit(f"gather.py: {name} is no page yet: add it to MORE")
        return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````\n"


def main():
    root, out = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    all_pages = gathered(root, out / "pages")
    for name, page in list(all_pages.pages.items()):
        all_pages.write(page, all_pages.with_links((root / name).read_text(), name, page))
    for name, page in list(all_pages.shown.items()):
        all_pages.write(page, all_pages.source_page(name))
    all_pages.write("api/index.md", "# API\n")  # Doxygen's page takes its place
    shutil.copytree(root / "docs/plots", out / "pages/plots")
    shutil.copy(root / "docs/site/extra.css", out / "pages/extra.css")
    shutil.copy(root / "docs/site/mkdocs.yml", out / "mkdocs.yml")


main()
