"""``python -m dbsl TOOL ...``, and the command ``dbsl`` of an installed package."""

import sys

from dbsl.base.errors import SettingError, one_line_errors, run_tool

TOOLS = {  # modules of dbsl/tools, by name
    "plan": "plan",
    "predict": "predict",
    "profile": "profile",
    "report": "report",
    "study": "study.study",
}


def main() -> None:
    """Run the tool that the first argument names."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else "none"
    if name not in TOOLS:
        with one_line_errors():
            raise SettingError(f"tool must be one of {', '.join(TOOLS)}, got {name}")
    run_tool(TOOLS[name])


if __name__ == "__main__":
    main()
