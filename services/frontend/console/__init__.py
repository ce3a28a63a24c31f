"""The console: one look at the mesh a second, made into what a page and `penstock top` show."""
