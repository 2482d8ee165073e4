"""``python -m dbsl.plan``: dbsl/tools/plan.py."""

if __name__ == "__main__":
    from dbsl.base.errors import run_tool

    run_tool("plan")
