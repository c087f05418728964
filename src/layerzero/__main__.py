"""python -m layerzero: the same as lz, where the folder of scripts is not on the path."""

from layerzero.client.cli.app import main

if __name__ == "__main__":
    main()
