"""Show what the compilers say: entries, tables, pictures, comparisons."""
