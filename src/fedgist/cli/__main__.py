"""Entry point of ``python -m fedgist.cli``."""

from fedgist.cli.main import main

if __name__ == "__main__":  # documentation tools import every module
    main()
