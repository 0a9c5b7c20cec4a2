"""What the compilers say, for people: entries, tables, pictures, comparisons."""
