"""Programs that are uploaded to a site and run there with Python 3.7 and its standard library."""
