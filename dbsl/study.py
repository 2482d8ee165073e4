"""``python -m dbsl.study``: dbsl/tools/study."""

if __name__ == "__main__":
    from dbsl.base.errors import run_tool

    run_tool("study.study")
