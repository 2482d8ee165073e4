"""``python -m dbsl.predict``: dbsl/tools/predict.py."""

if __name__ == "__main__":
    from dbsl.base.errors import run_tool

    run_tool("predict")
