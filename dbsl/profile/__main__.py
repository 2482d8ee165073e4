"""``python -m dbsl.profile``: dbsl/tools/profile.py."""

if __name__ == "__main__":
    import runpy

    runpy.run_module("dbsl.tools.profile", run_name="__main__", alter_sys=True)
