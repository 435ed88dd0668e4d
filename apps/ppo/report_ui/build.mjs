// Bundles the report into the Python package: `npm ci && npm run build`. OUT overrides the folder.
import { build } from "esbuild";

const out = process.env.OUT ?? "../src/rl_app_ppo/report/bundle";
const common = { bundle: true, minify: true, legalComments: "none", charset: "ascii", logLevel: "warning" };
await build({ ...common, entryPoints: ["src/main.ts"], outfile: `${out}/report.js`, format: "iife", target: "es2022" });
await build({ ...common, entryPoints: ["src/style.css"], outfile: `${out}/report.css` });
