"""``python -m dbsl.report RUN``: dbsl/tools/report.py."""

if __name__ == "__main__":
    import runpy

    runpy.run_module("dbsl.tools.report", run_name="__main__", alter_sys=True)
