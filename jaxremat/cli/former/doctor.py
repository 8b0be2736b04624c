"""`python -m jaxremat.doctor`: the former name of the command `jaxremat doctor`, for version 0.2 alone."""

from jaxremat.cli.main import former

if __name__ == "__main__":
    former("doctor")
