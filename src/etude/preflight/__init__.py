"""Before anything is bought: would this config run here, and what would it take?"""
