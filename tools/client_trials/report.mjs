// What every trial in JavaScript uses; see report.py.
export const URL_ = process.env.TOKENMILL_URL;
export const BASE = `${URL_}/v1`;
export const MODEL = "tokenmill-demo";

export async function call(name, make) {
  let error = "";
  try {
    if (!(await make())) error = "it gave nothing";
  } catch (problem) {
    error = `${problem.name}: ${problem.message}`.replaceAll("\n", " ").slice(0, 300);
  }
  console.log(JSON.stringify({ call: name, error }));
}
