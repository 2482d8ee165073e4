"""``python -m dbsl.report RUN``: dbsl/tools/report.py."""

if __name__ == "__main__":
    from dbsl.base.errors import run_tool

    run_tool("report")
