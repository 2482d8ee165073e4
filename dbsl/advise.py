"""``python -m dbsl.advise``: dbsl/tools/advise."""

if __name__ == "__main__":
    import runpy

    runpy.run_module("dbsl.tools.advise.advise", run_name="__main__", alter_sys=True)
