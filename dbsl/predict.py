"""``python -m dbsl.predict``: dbsl/tools/predict.py."""

if __name__ == "__main__":
    import runpy

    runpy.run_module("dbsl.tools.predict", run_name="__main__", alter_sys=True)
