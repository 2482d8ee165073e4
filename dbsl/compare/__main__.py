"""``python -m dbsl.compare``."""

from dbsl.base.errors import one_line_errors
from dbsl.compare.compare import main

if __name__ == "__main__":
    with one_line_errors():
        main()
