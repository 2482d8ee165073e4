"""``python -m experiments.compare``: compare.py, whose errors are one line."""

if __name__ == "__main__":
    from dbsl.base.errors import one_line_errors

    with one_line_errors():
        from experiments.compare.compare import main

        main()
