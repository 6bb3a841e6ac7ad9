"""How a line of ssh_config falls into words."""

from __future__ import annotations


def split_words(text: str) -> list[str]:
    """The words of a line: quotes hold words together, a backslash takes the next quote, backslash or space as it is,
    ``#`` at the start of a word begins a comment. Raises ValueError for a quote without an end."""
    words: list[str] = []
    word: list[str] = []
    inside, quote, index = False, "", 0
    while index < len(text):
        char = text[index]
        if (
            char == "\\"
            and index + 1 < len(text)
            and (text[index + 1] in "\"'\\" or (not quote and text[index + 1] == " "))
        ):
            index += 1
            word.append(text[index])
            inside = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                word.append(char)
        elif char in "\"'":
            quote, inside = char, True
        elif char in " \t":
            if inside:
                words.append("".join(word))
                word, inside = [], False
        elif char == "#" and not inside:
            break
        else:
            word.append(char)
            inside = True
        index += 1
    if quote:
        raise ValueError("a quote has no end")
    if inside:
        words.append("".join(word))
    return words
