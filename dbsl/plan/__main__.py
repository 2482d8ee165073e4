"""``python -m dbsl.plan``: dbsl/tools/plan.py."""

if __name__ == "__main__":
    import runpy

    runpy.run_module("dbsl.tools.plan", run_name="__main__", alter_sys=True)
