"""Write the pages, or parts of pages, that are made from the code."""
