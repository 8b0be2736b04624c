"""`python -m jaxremat`: the command `jaxremat`."""

from jaxremat.cli.main import script

if __name__ == "__main__":
    script()
