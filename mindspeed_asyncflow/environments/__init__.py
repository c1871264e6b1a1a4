"""What answers the model inside one row: tools and judges, in processes of their own."""
