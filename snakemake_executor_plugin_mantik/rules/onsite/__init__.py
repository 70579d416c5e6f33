"""What travels to a site and runs there, with no more than Python 3.7 and its standard library."""
