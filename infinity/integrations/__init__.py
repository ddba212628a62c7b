"""Front doors: what people bring from elsewhere, said in our own words."""
