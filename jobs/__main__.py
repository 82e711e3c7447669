"""`python -m jobs`: the command line where no entry point is on the path."""

from jobs.cli import main

if __name__ == "__main__":
    main()
