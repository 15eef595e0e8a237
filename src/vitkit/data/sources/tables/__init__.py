"""Images in the columns of tables: Parquet files, and the Arrow files of `datasets`."""
