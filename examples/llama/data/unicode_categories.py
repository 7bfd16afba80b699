#!/usr/bin/env python3
"""Writes unicode_categories.inc: the general category of every Unicode code point, as runs from U+0000 on.

    python3 unicode_categories.py > unicode_categories.inc

A run is a letter and, if it is longer than 1, its length. The letter is the place of the category in NAMES ('a' is Lu); 'A' and 'B'
are runs in which Lu and Ll alternate, beginning with Lu and with Ll. Source: the Unicode database in Python's unicodedata.
"""
import unicodedata

NAMES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cn".split()
END = 0x110000


def category(code_point):
    name = unicodedata.category(chr(code_point))
    return NAMES.index(name if name in NAMES else "Cn")  # Cc, Cf, Cs and Co count as Cn


def runs():
    all_of = [category(c) for c in range(END)]
    begin = 0
    while begin < END:
        end = begin + 1
        while end < END and all_of[end] == all_of[begin]:
            end += 1
        cased = begin
        if all_of[begin] < 2 and end == begin + 1:
            cased = end
            while cased < END and all_of[cased] == (all_of[begin] + cased - begin) % 2:
                cased += 1
        if cased > begin + 2:
            yield "AB"[all_of[begin]], cased - begin
            begin = cased
        else:
            yield "abcdefghijklmnopqrstuvwxyz"[all_of[begin]], end - begin
            begin = end


def main():
    text = "".join(letter + (str(length) if length > 1 else "") for letter, length in runs())
    print(f"// Unicode {unicodedata.unidata_version}, written by unicode_categories.py.")
    for begin in range(0, len(text), 118):
        print(f'"{text[begin:begin + 118]}"')


if __name__ == "__main__":
    main()
