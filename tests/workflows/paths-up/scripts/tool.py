import sys

from helper import text

print(text(), open(sys.argv[1] + "more.txt").read())
