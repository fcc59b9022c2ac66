"""``python -m polarstep``: the command line of the laboratory beside this package."""

from polarstep_lab.__main__ import main

if __name__ == "__main__":
    main()
