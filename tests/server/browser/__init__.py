"""The page in a real browser, under load, with hostile names.

    apt-get install chromium; npm install --prefix DIRECTORY puppeteer-core axe-core
    python -m tests.server.browser PICTURES DIRECTORY/node_modules

It ends with 1 when the page is wider than the window, a script of a name ran, another address was asked, or axe
complains. Look at the pictures, too.
"""
