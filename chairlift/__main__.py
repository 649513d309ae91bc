"""``python -m chairlift``."""

from chairlift.cli import main

if __name__ == "__main__":
    main()
