"""Text that prompts are cut from, written for this purpose: prose, numbers, code, other scripts, so that prompts differ in kind."""

TEXT = """The river bends twice before it reaches the old mill, and both bends flood in March. Nobody who lives there is surprised by it;
they keep their boats on the first floor and their flour on the second. Question: a baker has 14 trays with 12 rolls each and sells 9 dozen
before noon. How many rolls are left? Answer step by step. First count all rolls: 14 * 12 = 168. Then subtract what was sold: 9 * 12 = 108.
So 168 - 108 = 60 rolls are left, which is five dozen. def mean(values): return sum(values) / len(values) if values else 0.0
for name, score in sorted(table.items(), key=lambda item: -item[1]): print(f"{name:>12} {score:6.2f}") Der Zug nach Basel hat heute
zwanzig Minuten Verspätung, weil ein Schwan auf den Gleisen sitzt. Les enfants ont compté sept étoiles avant de s'endormir. 春の海 ひねもすのたり。
List three reasons why a bridge may hum in the wind: vortices behind the cables, loose deck plates, and the long spans between its piers.
In 1847 the harbour froze for nineteen days; the pilots walked home across the ice and wrote the names of their ships on it with ashes.
{"order": 5512, "items": [{"sku": "A-19", "count": 3}, {"sku": "K-02", "count": 1}], "paid": true} SELECT city, COUNT(*) FROM visits
GROUP BY city HAVING COUNT(*) > 10 ORDER BY 2 DESC; A recipe for plain soup: boil water, add salt, add whatever the garden has too much of,
and wait until the table stops talking. The teacher asked what is heavier, a kilo of feathers or a kilo of iron, and the class split in two.
Write a short letter to a friend who moved away. Dear Ina, the new people in your flat have a parrot that knows our telephone number.
"""
