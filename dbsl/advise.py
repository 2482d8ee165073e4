"""``python -m dbsl.advise``: dbsl/tools/advise."""

if __name__ == "__main__":
    from dbsl.base.errors import run_tool

    run_tool("advise.advise")
