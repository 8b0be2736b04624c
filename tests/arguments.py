"""Arguments of commands, put together of parts that the tests share."""


def once(*argv: str) -> list[str]:
    """The arguments with each flag once: of a flag that is given twice, the last one. A command refuses the first."""
    flags: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            flags.pop(word, None)
            flags[word] = [word]
        else:
            flags[[*flags][-1]].append(word)
    return [word for words in flags.values() for word in words]
