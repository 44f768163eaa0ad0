"""Questions about the shop, and the query that answers each."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

SHOP = Path(__file__).with_name("shop.sql.txt")
TRAIN, HELD_OUT = 256, 128
MOST = 26
"""Questions of one wording, at most: some could be asked of hundreds of prices."""

QUESTIONS = {
    "SELECT COUNT(*) FROM customers WHERE city = '{city}'": (
        "How many customers live in {city}?",
        "What is the number of customers in {city}?",
    ),
    "SELECT customer FROM customers WHERE city = '{city}'": (
        "Who lives in {city}?",
        "Which customers are from {city}?",
    ),
    "SELECT city FROM customers WHERE customer = '{customer}'": (
        "Where does {customer} live?",
        "Which city is {customer} from?",
    ),
    "SELECT price FROM products WHERE product = '{product}'": (
        "What does the {product} cost?",
        "What is the price of the {product}?",
    ),
    "SELECT product FROM products WHERE category = '{category}' AND price > {price}": (
        "Which {category} products cost more than {price} euros?",
        "List the {category} products over {price} euros.",
    ),
    "SELECT COUNT(*) FROM products WHERE price < {price}": (
        "How many products cost less than {price} euros?",
        "What is the number of products under {price} euros?",
    ),
    "SELECT product FROM products WHERE category = '{category}' ORDER BY price DESC LIMIT 1": (
        "What is the dearest product in {category}?",
        "Which {category} product has the highest price?",
    ),
    "SELECT AVG(price) FROM products WHERE category = '{category}'": (
        "What is the average price in {category}?",
        "What do {category} products cost on average?",
    ),
    "SELECT COUNT(*) FROM orders WHERE customer = '{customer}'": (
        "How many orders did {customer} place?",
        "How often did {customer} order?",
    ),
    "SELECT SUM(quantity) FROM orders WHERE product = '{product}'": (
        "How many units of the {product} were sold?",
        "What is the total quantity of the {product} in all orders?",
    ),
    "SELECT DISTINCT customer FROM orders WHERE product = '{product}'": (
        "Who ordered the {product}?",
        "Which customers bought the {product}?",
    ),
    "SELECT COUNT(*) FROM orders JOIN customers USING (customer) WHERE city = '{city}'": (
        "How many orders came from {city}?",
        "What is the number of orders by customers in {city}?",
    ),
    "SELECT SUM(quantity * price) FROM orders JOIN products USING (product) WHERE customer = '{customer}'": (
        "How much did {customer} spend?",
        "What is the value of all orders by {customer}?",
    ),
}


def rows(random: random.Random) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Different questions whose answers are not empty: to train on, and held out."""
    with closing(sqlite3.connect(":memory:")) as shop:
        shop.executescript(SHOP.read_text(encoding="utf-8"))
        words = {
            "customer": _column(shop, "SELECT customer FROM customers"),
            "city": _column(shop, "SELECT DISTINCT city FROM customers"),
            "product": _column(shop, "SELECT product FROM products"),
            "category": _column(shop, "SELECT DISTINCT category FROM products"),
            "price": [str(price) for price in range(10, 110)],
        }
        answers: dict[str, str] = {}
        for query, wordings in QUESTIONS.items():
            for wording in wordings:
                found: dict[str, str] = {}
                for _ in range(4 * MOST):
                    values = {name: random.choice(each) for name, each in words.items()}
                    answer = query.format(**values)
                    if len(found) < MOST and any(_column(shop, answer)):
                        found[wording.format(**values)] = answer
                answers |= found
    questions = [{"question": question, "answer": answer} for question, answer in answers.items()]
    random.shuffle(questions)
    return questions[:TRAIN], questions[TRAIN : TRAIN + HELD_OUT]


def _column(shop: sqlite3.Connection, query: str) -> list[str]:
    return [value for value, *_ in shop.execute(query)]
