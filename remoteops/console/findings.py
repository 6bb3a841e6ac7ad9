"""How an audit and a matrix look in a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from remoteops import recipes, rules, since

Finding = Mapping[str, Any]
Document = Mapping[str, Any]

ORDER = ("import", "start-up", "first-batch", "silent")
WHEN = {
    "import": "When it is imported",
    "start-up": "At start-up",
    "first-batch": "At the first batches",
    "silent": "Without any error",
}
PLAIN = str.maketrans("✗…", "x~")  # for a terminal in another encoding
MARKS = {"proved": ("✗", "bold red"), "contract": ("✗", "bold red"), "risk": ("?", "yellow")}


FEW = 8  # of what is told in one line each, unless --all


class Line(NamedTuple):
    """A line that wraps ``hang`` columns in below itself. ``whole``: never wrapped by us, so that it can be copied (a
    command)."""

    text: Text
    indent: int = 0
    hang: int = 0
    whole: bool = False


def show(console: Any, document: Document, *, everything: bool = False) -> None:
    """Print an audit: the verdict, then findings by when they strike, risks after them, what stayed open last.

    Through a pipe a line is a line, whatever its length.
    """
    screen = console.rich
    for part in render(document, everything=everything):
        if not isinstance(part, Line):
            screen.print(part)
            continue
        wraps = screen.is_terminal and not part.whole
        room = max(20, screen.width - part.indent - part.hang)
        for number, line in enumerate(_wrapped(part.text, room, part.hang) if wraps else [part.text]):
            line.rstrip()
            if not screen.encoding.startswith("utf"):
                line.plain = line.plain.translate(PLAIN)
            screen.print(Text(" " * (part.indent + part.hang * bool(number))).append_text(line), soft_wrap=True)


def _wrapped(text: Text, room: int, hang: int) -> list[Text]:
    """Lines broken between words only: a path that is longer than a line stays whole. The first has ``hang`` more."""
    breaks: list[int] = []
    start = hang
    for word in re.finditer(r"\S+", text.plain):
        if word.end() - start > room and word.start() > (breaks[-1] if breaks else 0):
            start = word.start()
            breaks.append(start)
    return list(text.divide(breaks))


def render(document: Document, *, everything: bool = False) -> list[RenderableType | Line]:
    """The parts of an audit's view, in order."""
    findings = list(document["findings"])
    broken = [finding for finding in findings if finding["confidence"] != "risk"]
    risks = [finding for finding in findings if finding["confidence"] == "risk"]
    parts: list[RenderableType | Line] = [verdict(document)]
    for when in ORDER:
        group = [finding for finding in broken if finding["when"] == when]
        if group:
            parts.append(Text(f"\n{WHEN[when]}", style="bold"))
            parts += [line for finding in group for line in render_finding(finding)]
    changed = [finding for finding in risks if finding["rule"] in rules.BASELINE and not everything]
    risks = [finding for finding in risks if finding not in changed]
    if risks:
        parts.append(Text("\nRisks (true for some models or settings, or wrong without an error)", style="bold"))
        parts += [line for finding in risks for line in render_finding(finding)]
    if changed:
        since = _side(document["baseline"]) if document.get("baseline") else "the baseline"
        parts.append(Text(f"\nChanged since {since}, not known to matter ({len(changed)})", style="bold"))
        parts += _few([_brief(finding) for finding in changed], FEW)
    unresolved = list(document["unresolved"])
    if unresolved:
        parts.append(Text(f"\nNot decided ({len(unresolved)})", style="bold"))
        parts += _few([Text(_open(record), style="dim") for record in unresolved], None if everything else FEW)
    if everything and document.get("sites_list"):
        parts.append(_sites(document["sites_list"]))
    for check in document.get("checks", ()):
        parts.append(_check(check))
    parts += [Line(Text(f"note: {plain(note)}", style="dim")) for note in document.get("notes", ())]
    if broken and document.get("host"):
        parts.append(Line(_next(document, broken)))
    return parts


def _few(texts: Sequence[Text], most: int | None) -> Iterator[Line]:
    shown = texts if most is None else texts[:most]
    yield from (Line(text, 2, 2) for text in shown)
    if len(shown) < len(texts):
        yield Line(Text(f"… {len(texts) - len(shown)} more with --all", style="dim"), 2)


def _brief(finding: Finding) -> Text:
    place = f"{plain(finding['file']).rpartition('/')[2]}:{finding['line']}"
    return Text(f"{place}  {finding['rule']}  {plain(_short_symbol(finding['symbol']))}", style="dim")


def _next(document: Document, broken: Sequence[Finding]) -> Text:
    """The verdict once more, below what it rests on, and the command that goes on from here."""
    fixes = sum(known_fix(finding) is not None for finding in broken)
    host = plain(document["host"])
    told = Text(f"\n{host}: {_count(len(broken), 'break')}, {fixes} with a known fix", style="bold red")
    if fixes:
        told.append(f"; fab -H {host} patch shows the edits and asks", style="not bold")
    return told


def verdict(document: Document) -> Text:
    """One line that answers the question, one that says what it rests on."""
    broken = [finding for finding in document["findings"] if finding["confidence"] != "risk"]
    pair = f"{_side(document['consumer'])} on {_side(document['provider'])}"
    where = f"{plain(document['host'])}: " if document.get("host") else ""
    if broken:
        fixes = sum(known_fix(finding) is not None for finding in broken)
        head = Text(f"{where}{pair}: {_count(len(broken), 'break')}", style="bold red")
        head.append(f", {fixes} with a known fix", style="bold")
    else:
        head = Text(f"{where}{pair}: no break found", style="bold green")
    baseline = f", against {_side(document['baseline'])}" if document.get("baseline") else ""
    head.append(
        f"\n{_count(document['sites'], 'site')} audited, {document['ok']} fine, "
        f"{len(document['unresolved'])} not decided"
        f"{baseline}; {document['seconds']:.2f} s",
        style="not bold dim",
    )
    return head


def render_finding(finding: Finding) -> list[Line]:
    """A finding in a few lines: where, what, expected and found, the error, the way out, how to see it by hand."""
    mark, style = MARKS.get(finding["confidence"], ("·", ""))
    detail = str(finding["detail"])
    place = f"{plain(finding['file'])}:{finding['line']}"
    what = _joined(plain(_short_symbol(finding["symbol"])), plain(detail))
    lines = [
        Line(Text.assemble((f"{mark} ", style), (place, "cyan"))),
        _line("", Text.assemble((plain(finding["rule"]), "bold"), "  ", what)),
    ]
    if finding.get("since"):
        lines.append(_line("since", plain(since.text(finding["since"]).removeprefix("since "))))
    if finding.get("was"):
        lines.append(_line("was", elide(plain(finding["was"]), detail)))
    if finding.get("now") or finding.get("now_at"):
        now = Text(elide(plain(finding.get("now") or ""), detail))
        now.append(f"  {plain(finding.get('now_at') or '')}", style="dim")
        lines.append(_line("now", now))
    if finding.get("error"):
        lines.append(_line("error", plain(finding["error"])))
    lines.append(_line("fix", describe_fix(finding)))
    if finding.get("check"):
        lines.append(_line("check", Text(plain(finding["check"]), style="dim"), whole=True))
    lines.append(_line("more", Text(rules.page(finding["rule"]), style="dim")))
    return lines


def elide(text: str, detail: str, width: int = 100) -> str:
    """A signature with the parameter in question whole and the others shortened to fit; other text as it is.

    ``f(a: int, b: str = 'x', c=1)`` about ``b`` is ``f(…, b: str = 'x', …)``; without such a parameter, names only.
    """
    if len(text) <= width:
        return text
    parts = _parameters(text)
    if parts is None:
        at = text.find(detail) if detail else -1
        start = max(0, min(at - width // 2, len(text) - 2 * width)) if at > width else 0
        cut = text[start : start + 2 * width]
        return ("… " if start else "") + cut + (" …" if start + 2 * width < len(text) else "")
    head, inside, tail = parts
    wanted = (
        [one for one in inside if re.match(rf"\*{{0,2}}{re.escape(detail)}\b", one)] if detail.isidentifier() else []
    )
    if wanted:
        first, last = inside[0] in wanted, inside[-1] in wanted
        shown = ("" if first else "…, ") + ", ".join(wanted) + ("" if last else ", …")
    else:
        names = [re.split(r"[:=]", one)[0].strip() for one in inside]
        while len(", ".join(names)) > width and len(names) > 1:
            names = [*names[: len(names) // 2 - 1], "…"] if names[-1] != "…" else [*names[: len(names) // 2], "…"]
        shown = ", ".join(names)
    return f"{head}({shown}){tail}"


def _parameters(text: str) -> tuple[str, list[str], str] | None:
    """``name(a, b: dict[str, int]) -> x`` as head, parameters and tail; None when it is no signature."""
    found = re.match(r"[\w.]+(?=\()", text)
    if found is None:
        return None
    depth, parts, start = 0, [], found.end() + 1
    for at in range(found.end(), len(text)):
        char = text[at]
        depth += (char in "([{") - (char in ")]}")
        if (depth == 1 and char == ",") or depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
        if depth == 0:
            version = re.search(r" \([^()]*\)$", text[at + 1 :])
            return found[0], [one for one in parts if one], version[0] if version else ""
    return None


def _line(name: str, value: str | Text, *, whole: bool = False) -> Line:
    return Line(Text.assemble((f"{name:<7}" if name else "", "dim"), value), 4, 7, whole)


def _short_symbol(symbol: object) -> str:
    """The last two parts of a dotted path (a method with its class): the place of the rest is in ``now``."""
    parts = str(symbol).split(".")
    return ".".join(parts[-2:]) if all(part.isidentifier() for part in parts) else str(symbol)


def describe_fix(finding: Finding) -> str:
    """What ``fab patch`` would do about a finding, in words."""
    fix = known_fix(finding)
    if not fix:
        return "none known"
    if "recipe" in fix:
        return f"recipe {plain(fix['recipe'])}"
    words = [
        plain(str(fix[key])) for key in ("name", "keyword", "attribute", "old", "to", "new", "value") if fix.get(key)
    ]
    return f"{plain(fix['edit'])} {' '.join(words)}".strip()


def known_fix(finding: Finding) -> Mapping[str, Any] | None:
    """The edit or recipe that resolves a finding: what it names, else what the recipes recognise in it."""
    recipe = recipes.recipe_for(finding, recipes.load())
    if recipe is not None:
        return None if recipe.impossible else {"recipe": recipe.id}
    return recipes.mechanical(finding)


def show_matrix(console: Any, document: Document) -> None:
    """Print a matrix: a row a provider release, a column a consumer."""
    console.rich.print(render_matrix(document))
    for consumer, releases in document["installable"].items():
        stretches = document.get("ranges", {}).get(consumer, {}).get("works", [[r, r] for r in releases])
        named = [first if first == last else f"{first} to {_release(last)}" for first, last in stretches]
        text = ", ".join(plain(one) for one in named) or "none of these"
        console.rich.print(Text.assemble((f"{plain(consumer)} works unpatched with: ", "bold"), text))
    fixed: dict[str, list[str]] = {}
    for row in document["rows"]:
        if row.get("fixable"):
            fixed.setdefault(plain(row["consumer"]), []).append(plain(row["provider"]))
    for consumer, releases in fixed.items():
        console.rich.print(Text.assemble((f"{consumer} works patched with: ", "bold"), ", ".join(releases)))
    cached = sum(bool(row.get("cached")) for row in document["rows"])
    console.rich.print(
        Text(
            f"{_count(len(document['rows']), 'pair')} in {document['seconds']:.1f} s ({cached} from the cache)",
            style="dim",
        )
    )


def _release(label: str) -> str:
    return label.rpartition("==")[2]


def render_matrix(document: Document) -> Table:
    """Cells: breaks (proved+contract), ``+N?`` risks; green none, yellow all fixable, red not."""
    consumers = list(dict.fromkeys(row["consumer"] for row in document["rows"]))
    providers = list(dict.fromkeys(row["provider"] for row in document["rows"]))
    cells = {(row["consumer"], row["provider"]): row for row in document["rows"]}
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("provider")
    for consumer in consumers:
        table.add_column(plain(consumer))
    for provider in providers:
        table.add_row(plain(provider), *[_cell(cells.get((consumer, provider))) for consumer in consumers])
    return table


def plain(text: object) -> str:
    """Text without control characters: what came from a host or a source file must not steer the terminal."""
    return "".join(char if char.isprintable() or char == "\t" else f"\\x{ord(char):02x}" for char in str(text))


def _cell(row: Mapping[str, Any] | None) -> Text:
    if row is None:
        return Text("")
    if row.get("error"):
        return Text("not audited: " + plain(row["error"]).splitlines()[0][:60], style="dim")
    risks = f" +{row['risks']}?" if row["risks"] else ""
    if row["breaks"] == 0:
        return Text.assemble(("works", "green"), (risks, "yellow"))
    if row["fixable"]:
        return Text.assemble((_count(row["breaks"], "break") + ", all fixable", "yellow"), (risks, "yellow"))
    return Text.assemble(
        (_count(row["breaks"], "break"), "red"),
        (risks, "yellow"),
        (f"  no fix: {', '.join(map(plain, row['unfixable']))}", "dim"),
    )


def _sites(sites: list[Mapping[str, Any]]) -> Table:
    table = Table(
        "state",
        "place",
        "kind",
        "symbol",
        title="All sites",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    for site in sites:
        state = str(site.get("state") or site.get("status") or "")
        table.add_row(
            plain(state),
            f"{plain(site['file'])}:{site['line']}",
            plain(site.get("kind", "")),
            plain(site.get("symbol", "")),
        )
    return table


def _check(check: Mapping[str, Any]) -> RenderableType:
    head = Text.assemble(
        ("\n$ ", "dim"), (plain(check["command"]), "bold"), (f"    # {plain(check['purpose'])}", "dim")
    )
    if "output" not in check:
        return head
    body = "\n".join(plain(line) for line in check["output"].splitlines())
    status = (
        ""
        if check["exit"] == 0
        else f"\n(exit {check['exit']})"
        if check["exit"] is not None
        else "\n(no end within the time given)"
    )
    return Group(head, Text(body + status))


def _open(record: Mapping[str, Any]) -> str:
    place = f"{plain(record.get('file', ''))}:{record.get('line', '')}"
    return f"{place}  {plain(record.get('symbol', ''))}  {plain(record.get('reason', ''))}"


def _side(side: Mapping[str, Any]) -> str:
    return plain(f"{side['package']} {side['version']}" if side.get("version") else side["package"])


def _joined(symbol: str, detail: str) -> str:
    return f"{symbol}: {detail}" if detail and detail not in symbol.rpartition(".")[2] else symbol


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
