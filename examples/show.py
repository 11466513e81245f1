"""Print the results of `batonq run` for a reader: each row's id, what became of it, and the text."""

import json
import sys
from pathlib import Path
from textwrap import indent


def main(path: str) -> None:
    """Show every row of a results file, in the order it was written."""
    with Path(path).open(encoding="utf-8") as rows:
        for row in map(json.loads, rows):
            error = row.get("error")
            if error:
                sys.stdout.write(f"{row['custom_id']}: {error['code']}: {error['message']}\n\n")
                continue
            choice = row["response"]["body"]["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            sys.stdout.write(f"{row['custom_id']} ({choice['finish_reason']})\n{indent(text.strip(), '    ')}\n\n")


if __name__ == "__main__":
    main(sys.argv[1])
