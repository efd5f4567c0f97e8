"""What commands do once their options are read. All of it needs torch, which takes seconds to import."""
