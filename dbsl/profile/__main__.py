"""``python -m dbsl.profile``: dbsl/tools/profile.py."""

if __name__ == "__main__":
    from dbsl.base.errors import run_tool

    run_tool("profile")
