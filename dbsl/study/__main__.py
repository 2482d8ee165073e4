"""``python -m dbsl.study``."""

from dbsl.base.errors import one_line_errors
from dbsl.study.study import main

if __name__ == "__main__":
    with one_line_errors():
        main()
