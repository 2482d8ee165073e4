"""``python -m dbsl.compare``: dbsl/tools/compare."""

if __name__ == "__main__":
    from dbsl.base.errors import run_tool

    run_tool("compare.compare")
