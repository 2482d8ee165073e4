"""``python -m dbsl.compare``: dbsl/tools/compare."""

if __name__ == "__main__":
    import runpy

    runpy.run_module("dbsl.tools.compare.compare", run_name="__main__", alter_sys=True)
