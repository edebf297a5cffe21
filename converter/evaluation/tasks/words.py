"""The words that make up the names of lines."""

_ADJECTIVES = """
able acid agile airy alert amber ample antique aqua arctic bald bare basic bitter blank bleak blunt bold
bouncy brave brief bright brisk broad bronze bulky calm candid casual cheap chief chilly civil classic clean
clever coastal cold common cosy crisp curious curly daily damp daring deep dense dim distant double dry dull
dusty eager early earnest easy elastic elder empty even exact faint fair famous fancy fast fierce final firm
flat fluffy fond formal frail free fresh frosty full funny gentle giant glad global gold good grand grave
green grey handy happy hardy harsh hasty heavy hidden high hollow honest huge humble icy ideal idle inner
iron jolly junior just keen kind large late lazy lean light lively local lone long loud low loyal lucky main
major mellow merry mild minor misty modern modest moist mute narrow native neat new nimble noble noisy novel
odd old olive open orange outer oval pale plain plump polite proud pure purple quick quiet quirky rapid rare
raw ready red regal rich ripe rough round royal rural rusty salty scarce secret senior sharp short shy
silent silver simple sleepy slim slow small smooth soft solid sour spare spicy square stable steep stiff
still stormy strict strong subtle sunny sweet swift tall tame tart teal tender thick thin tidy tiny tough
tropical true twin upper urban usual vague vast velvet vital vivid warm weary wet white wide wild wise witty
wooden woolly yellow young zesty
"""
_NOUNS = """
acorn actor anchor ankle apple apron arch arrow artist atlas attic autumn badge bagel baker balcony banjo
barn basket beach beacon beaver bell bench berry bicycle bird blanket boat book bottle boulder bracket
branch bread breeze brick bridge broom bucket butter button cabin cactus camel camera candle canoe canyon
captain carpet castle cedar cello chair chalk cheese cherry chimney circle clock cloud clover coat cobra
coffee comet compass copper coral cotton cousin crane crayon creek cricket crown curtain cushion dancer
desert desk diamond dolphin donkey door dragon drawer dress drum duck eagle easel elbow engine envelope
falcon farmer feather fence fern ferry fiddle field finger fire flag flute forest fork fossil fountain fox
frog garden garlic gate ghost giraffe glacier glove goat grape guitar hammer harbour hat hawk hedge helmet
heron hill honey horse hotel island ivory jacket jaguar jar jewel judge jungle kettle key king kitchen kite
knee knight ladder lagoon lake lamp lantern lawyer leaf lemon letter lily lion lizard lobster locket magnet
maple marble market meadow melon mirror monkey moon moth mountain mushroom napkin needle nest notebook nurse
oak oasis ocean onion orchard otter oven owl paddle painter palace panda paper parrot peach pebble pencil
pepper piano pigeon pillow pilot pine planet plate pocket poet pond pony poppy potato prairie prince pumpkin
puzzle quarry queen quilt rabbit raccoon radio raft rain raven ribbon ridge river road robin rocket roof
rose saddle sailor salad salmon sand scarf school scooter shadow shark shell shovel sister sketch snail soup
spider spoon squid station stone stove street summer sunset swan sweater table tailor teapot temple tent
theatre thistle thread throne thunder ticket tiger tomato torch tower train tree trumpet tulip tunnel turtle
umbrella uncle valley vase village violin voyage wagon walnut walrus water whale wheel whistle widow willow
window winter wizard wolf wool yacht zebra
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
