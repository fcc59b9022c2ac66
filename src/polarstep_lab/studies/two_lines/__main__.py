"""``python -m polarstep_lab.studies.two_lines``: see :mod:`polarstep_lab.studies.two_lines.runs`."""

from polarstep_lab.studies.two_lines.runs import main

if (
    __name__ == "__main__"
):  # workers import ``runs``: they cannot find what is in a file of this name
    main()
