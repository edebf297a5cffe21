"""Facts for needles: a question, and a sentence that answers it without repeating all of its words."""

from __future__ import annotations

_FACTS = """
Who painted the Mona Lisa?|The Mona Lisa is a work of Leonardo da Vinci.
Who wrote Hamlet?|Hamlet is a tragedy by William Shakespeare.
What is the chemical formula of water?|A molecule of water has two hydrogen atoms and one of oxygen, H2O.
What is the capital of Australia?|Australia is governed from Canberra.
How tall is Mount Everest?|Mount Everest rises 8849 metres above the sea.
Who discovered penicillin?|Alexander Fleming found penicillin in 1928.
What is the largest planet?|Jupiter is bigger than all other planets of the sun together.
How fast does light travel?|Light covers about 300,000 kilometres in a second.
Who composed the Moonlight Sonata?|The Moonlight Sonata is by Ludwig van Beethoven.
What is the longest river in Africa?|No African river is longer than the Nile.
When did the Berlin Wall fall?|The Berlin Wall was opened in November 1989.
Who proposed the theory of relativity?|Relativity goes back to Albert Einstein.
What is the hardest natural mineral?|Diamond scratches every other mineral.
Which metal is liquid at room temperature?|Mercury is a metal that flows even on a cold day.
Who wrote Pride and Prejudice?|Pride and Prejudice is a novel by Jane Austen.
What is the smallest prime number?|Two is the first of the primes.
Where is the Taj Mahal?|The Taj Mahal stands in Agra, in India.
What do bees collect from flowers?|Bees carry nectar and pollen to the hive.
How many strings does a violin have?|A violin is played on four strings.
What is the freezing point of water in Celsius?|Water turns to ice at zero degrees Celsius.
Who was the first person on the Moon?|Neil Armstrong was the first to step on the Moon.
What is the currency of Japan?|In Japan people pay with yen.
Which gas do plants take in?|Plants breathe carbon dioxide in and give oxygen back.
Who wrote Don Quixote?|Don Quixote was written by Miguel de Cervantes.
What is the tallest animal?|A giraffe looks down on every other animal.
How many bones does an adult human have?|The skeleton of a grown person consists of 206 bones.
What is the largest ocean?|The Pacific covers more of the Earth than any other ocean.
Who invented the telephone?|Alexander Graham Bell received the patent for the telephone in 1876.
What is the square root of 144?|Twelve times twelve is 144.
Which country has the shape of a boot?|On a map, Italy looks like a boot.
Who painted The Starry Night?|Vincent van Gogh finished The Starry Night in 1889.
What is the main language of Brazil?|Most people in Brazil speak Portuguese.
How many sides does a hexagon have?|A hexagon is closed by six sides.
Who discovered radium?|Radium was isolated by Marie Curie and her husband.
What is the capital of Canada?|The Canadian parliament meets in Ottawa.
What is the boiling point of ethanol?|Ethanol boils at 78 degrees Celsius.
Who wrote War and Peace?|Leo Tolstoy is the author of War and Peace.
What is the largest desert?|Antarctica is a desert, and no other is larger.
Which planet has the brightest rings?|Saturn is known for its bright rings.
When did the Second World War end?|The Second World War was over in 1945.
Who composed The Four Seasons?|Antonio Vivaldi wrote the concertos of The Four Seasons.
What is the chemical symbol of gold?|Gold appears as Au in the periodic table.
What do pandas eat?|A panda lives almost only on bamboo.
Where is Machu Picchu?|Machu Picchu lies high in the mountains of Peru.
Who formulated the laws of motion?|The three laws of motion are Isaac Newton's.
How many players are in a football team?|In football, eleven players of each team are on the pitch.
What is the deepest lake?|Lake Baikal reaches down 1642 metres.
Who wrote the Odyssey?|The Odyssey is attributed to Homer.
What is the capital of Turkey?|Ankara, not Istanbul, is where the Turkish government sits.
Which organ pumps blood?|The heart keeps blood moving through the body.
What is the value of pi?|Pi begins with 3.14159.
Who sculpted David in Florence?|The David of Florence was carved by Michelangelo.
How long does the Earth take around the Sun?|The Earth needs 365 days and a quarter for its orbit.
What is the fastest land animal?|Over a short distance, a cheetah outruns every animal on land.
Who wrote The Trial?|The Trial is an unfinished novel by Franz Kafka.
Where do penguins live?|Penguins are birds of the southern half of the Earth.
What is the chemical formula of table salt?|Table salt is sodium chloride, NaCl.
Who invented the printing press in Europe?|Johannes Gutenberg printed with movable type in Mainz.
What is the capital of New Zealand?|New Zealand is governed from Wellington.
Which instrument has 88 keys?|A piano is played on 88 keys.
Who discovered the structure of DNA?|Watson and Crick described the double helix of DNA in 1953.
What is the longest wall?|China's Great Wall is longer than any other wall.
How many continents are there?|Maps usually show seven continents.
Who painted Guernica?|Guernica is Pablo Picasso's picture of a bombed town.
What is the largest mammal?|The blue whale is heavier than any other mammal.
What is the smallest country?|Vatican City would fit into a park.
Who wrote Faust?|Goethe worked on Faust for most of his life.
Which element is the lightest?|Hydrogen comes first in the periodic table and weighs least.
When was the French Revolution?|The French Revolution began in 1789.
What is the capital of Egypt?|Cairo is the seat of Egypt's government.
Who composed the opera The Magic Flute?|The Magic Flute is one of Mozart's last operas.
How many legs does a spider have?|A spider walks on eight legs.
What is the highest waterfall?|Angel Falls in Venezuela drops almost a kilometre.
Who founded psychoanalysis?|Psychoanalysis was begun by Sigmund Freud in Vienna.
What is the unit of electrical resistance?|Resistance is measured in ohms.
Which city has the Colosseum?|The Colosseum draws visitors to Rome.
Who wrote The Origin of Species?|Charles Darwin published The Origin of Species in 1859.
What is the closest star to the Earth?|Apart from the Sun, Proxima Centauri is our nearest star.
How many degrees are in a circle?|A full circle is divided into 360 degrees.
Who was the first emperor of Rome?|Augustus became Rome's first emperor.
What is the capital of Kenya?|Kenya is governed from Nairobi.
Which vitamin does sunlight produce?|Skin in the sun makes vitamin D.
Who wrote Moby-Dick?|Moby-Dick is Herman Melville's story of a white whale.
What is the largest island?|Greenland is bigger than every other island.
How many minutes does a day have?|There are 1440 minutes between two midnights.
Who discovered X-rays?|Wilhelm Röntgen was the first to see X-rays.
What is glass made of?|Glass is mostly molten sand.
Where was the Titanic built?|The Titanic left a shipyard in Belfast.
Who painted the Girl with a Pearl Earring?|Johannes Vermeer painted the Girl with a Pearl Earring.
What is the capital of Norway?|Norway's king lives in Oslo.
Which bird cannot fly but runs fast?|An ostrich has wings but only runs.
Who wrote One Hundred Years of Solitude?|One Hundred Years of Solitude is by Gabriel García Márquez.
What is the speed of sound in air?|Sound moves through air at 343 metres a second.
How many hearts does an octopus have?|An octopus has three hearts.
Who built the first practical steam engine?|Thomas Newcomen's steam engine pumped water from mines.
What is the largest organ of the human body?|Nothing in the human body is larger than the skin.
Which country gave the Statue of Liberty?|The Statue of Liberty was a present from France.
Who invented dynamite?|Alfred Nobel made his fortune with dynamite.
What is the capital of Vietnam?|Vietnam is governed from Hanoi.
How many moons does Mars have?|Phobos and Deimos are the two moons of Mars.
Who wrote The Little Prince?|The Little Prince was drawn and told by Antoine de Saint-Exupéry.
What is the most common gas in the air?|Nitrogen makes up 78 per cent of the air.
Which sea is the saltiest?|In the Dead Sea, swimmers float on the salt.
Who was the first woman in space?|Valentina Tereshkova flew into space in 1963.
"""
FACTS: tuple[tuple[str, str], ...] = tuple(
    (question, answer)
    for question, _, answer in (line.partition("|") for line in _FACTS.strip().splitlines())
)
"""Questions and answers."""
SENTENCES = tuple(
    """
The first weeks of a new job are mostly spent finding out what nobody wrote down.
A plan that survives its first month has usually been changed in every part.
People who start small things often learn more than those who wait for a large one.
It is easier to throw away a bad page than to repair it.
Most meetings could have been a short note, and most notes could have been shorter.
Good habits look dull from outside, and that is part of why they last.
An honest answer takes longer to prepare than a clever one.
Nobody noticed the work when it went well, and that was how it was meant to be.
Every tool changes the hand that uses it a little.
The second attempt is seldom the best one, but it is the one from which we learn.
He kept a list of mistakes, and the list became the most useful thing he owned.
There is a kind of patience that looks like laziness until the result is there.
She preferred questions that could be answered by trying.
What is obvious to an expert was a surprise once.
A small team can change its mind over lunch.
Old notebooks show how slowly a simple idea becomes simple.
Writing is a way to find out what one does not yet understand.
The town was quiet in winter, and the shops closed before it was dark.
Trains were late that year, and travellers had time to talk.
The garden behind the house had been left alone, and it was better for it.
A clear sentence is worth the morning that it costs.
Customers seldom ask for what they need, but they always know what hurts.
The best advice came from people who did not offer any.
Numbers without a story are soon forgotten, and stories without numbers are soon doubted.
After a while the noise of the street became a kind of silence.
It helps to explain a problem to somebody who is not interested in it.
He wrote letters to friends and did not send half of them.
The weather changed in the afternoon, as the fishermen had said it would.
To finish is a skill of its own, and few practise it.
They measured twice, and then they measured what they had forgotten.
A rule is best remembered by the story of why it was made.
On some days the only progress is to see that yesterday's was none.
""".strip().splitlines()
)
"""Filler that answers no question."""
