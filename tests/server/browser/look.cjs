// Takes pictures of the page in light and dark at two widths, and has axe judge each. Arguments: the page's address, a
// directory for the pictures, and the directory of node_modules with puppeteer-core and axe-core.
"use strict";
const path = require("node:path"), fs = require("node:fs");
const [, , url, out, modules] = process.argv;
const puppeteer = require(path.join(modules, "puppeteer-core")), axe = require(path.join(modules, "axe-core"));
const SIZES = [[1280, 900], [360, 740]];

async function main() {
  const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", headless: true,
    args: ["--no-sandbox", "--disable-dev-shm-usage"] });
  let found = [];
  try {
    for (const scheme of ["light", "dark"]) for (const [width, height] of SIZES) {
      const page = await browser.newPage(), wrong = [];
      page.on("dialog", (dialog) => { wrong.push(`a dialog: ${dialog.message()}`); dialog.dismiss(); });
      page.on("pageerror", (error) => wrong.push(`an error: ${error.message}`));
      page.on("request", (asked) => { if (!asked.url().startsWith(url)) wrong.push(`asked elsewhere: ${asked.url()}`); });
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await page.setViewport({ width, height });
      await page.goto(url, { waitUntil: "load" });
      await page.waitForSelector("section h3", { timeout: 30000 });
      await new Promise((done) => setTimeout(done, 6000));
      await page.evaluate(() => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      if (wide > width) wrong.push(`the page is ${wide} pixels wide at ${width}`);
      await page.screenshot({ path: path.join(out, `${scheme}-${width}.png`), fullPage: true });
      const judged = await page.evaluate(`${axe.source}; axe.run(document)`);
      for (const each of judged.violations)
        wrong.push(`${each.impact}: ${each.id}: ${each.nodes.map((node) => node.target.join(" ")).slice(0, 3).join(", ")}`);
      console.log(`${scheme} ${width}: ${judged.passes.length} rules passed, ${wrong.length} complaints`);
      found = found.concat(wrong.map((each) => `${scheme} ${width}: ${each}`));
      await page.close();
    }
  } finally {
    await browser.close();
  }
  for (const each of found) console.log(each);
  process.exitCode = found.length ? 1 : 0;
}

fs.mkdirSync(out, { recursive: true });
main().catch((error) => { console.error(error); process.exitCode = 2; });
