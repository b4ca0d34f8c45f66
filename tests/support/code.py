"""Python code as a program, which `zygote` starts without its imports: the arguments are the code and its own."""

import sys

if __name__ == "__main__":
    code = sys.argv.pop(1)
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})  # noqa: S102  (a test's own)
