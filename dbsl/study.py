"""``python -m dbsl.study``: dbsl/tools/study."""

if __name__ == "__main__":
    import runpy

    runpy.run_module("dbsl.tools.study.study", run_name="__main__", alter_sys=True)
