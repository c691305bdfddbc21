"""Write the table of measured quality into the README, from results/quality_*.json.

Each of those was written by

    kvjax eval smollm2 --text NOVEL.txt --tokens 2560 --preset P --json FILE

with FILE = results/quality_NOVEL_2560_P.json
"""

import collections
import json
import pathlib
import re

HERE = pathlib.Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- quality table: experiments/quality_table.py -->", "<!-- end -->"


def span(values: list[float], form: str) -> str:
    low, high = (form.format(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} – {high}"


def table() -> str:
    results = [json.loads(file.read_text()) for file in sorted(HERE.glob("results/quality_*.json"))]
    by_preset = collections.defaultdict(list)
    for result in results:
        if result["tokens"] == 2560:
            by_preset[result["preset"]].append(result)
    lines = [
        "| preset | mean KL from the full cache, nats | top-1 agreement | perplexity ratio |",
        "|---|---|---|---|",
    ]
    for preset in ("safe", "balanced", "extreme", "literal"):
        rows = by_preset[preset]
        cells = (
            span([row["kl_mean"] for row in rows], "{:.4f}"),
            span([100 * row["top1_agreement"] for row in rows], "{:.1f}") + " %",
            span([row["perplexity_ratio"] for row in rows], "{:.3f}"),
        )
        lines.append(f"| `{preset}` | {' | '.join(cells)} |")
    texts = sorted({row["text"].removesuffix(".txt") for row in results if row["tokens"] == 2560})
    lines += ["", f"Least to greatest over {len(texts)} texts: {', '.join(texts)}."]
    return "\n".join(lines)


def main() -> None:
    text = README.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    README.write_text(pattern.sub(f"{BEGIN}\n{table()}\n{END}", text))


if __name__ == "__main__":
    main()
