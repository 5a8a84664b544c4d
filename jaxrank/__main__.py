"""`python -m jaxrank` is `jaxrank`."""

from jaxrank.cli import main

if __name__ == "__main__":
    main()
