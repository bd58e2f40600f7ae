"""`python -m looplm`: the same as the `looplm` command."""

from looplm.cli.main import main

if __name__ == "__main__":
    main()
